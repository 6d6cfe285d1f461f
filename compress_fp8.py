#!/usr/bin/env python3
"""Turn a Hugging Face checkpoint into an FP8, INT8, INT4 or FP4 directory: python compress_fp8.py -m Qwen/Qwen3-32B"""

import sys

from openquant.__main__ import compress_main

if __name__ == "__main__":
    sys.exit(compress_main())
