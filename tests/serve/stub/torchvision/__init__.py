"""As much of torchvision as importing transformers' image processors takes; none of it computes anything.

torchvision has no CPU build for the torch of vLLM's CPU build. vLLM imports a multimodal model's image processor
before it builds the model, and these tests give it no image.
"""

__version__ = "0.0"
