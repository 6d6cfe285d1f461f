"""See the package."""

from torchvision.transforms import InterpolationMode as InterpolationMode
