"""The command line: its parser, the terminal, and what each verb does with its arguments.

arguments   the parsers, made from options.py
commands    one function for each verb; `compress_main` and `main` run them
console     printing, progress and interrupts

The entry points are in `openquant/__main__.py`.

compress_main(["-m", "Qwen/Qwen3-8B", "--dry-run"])      # 0, and the plan is printed
"""
