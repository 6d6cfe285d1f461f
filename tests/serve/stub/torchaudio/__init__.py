"""As much of torchaudio as vLLM's FunASR imports (transformers_utils/processors/funasr.py:8), as torchvision's stub."""

__version__ = "0.0"
