"""The command line: its parser, the terminal, and what each verb does with its arguments.

start       the first lines of every command: signals are heard before anything large is imported
arguments   the parsers, made from options.py
commands    one function for each verb: `compress_main`, `main`
console     what is printed on which stream, progress, interrupts; nothing else prints
interrupts  what SIGINT and SIGTERM mean before anything has begun

compress_main(["-m", "Qwen/Qwen3-8B", "--dry-run"])      # 0, and the plan is printed
"""
