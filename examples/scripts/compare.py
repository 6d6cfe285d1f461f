"""Say how far outputs are from their source.   python compare.py MODEL OUTPUT [OUTPUT ...]"""

import sys

import openquant

model, *outputs = sys.argv[1:]
for measured in openquant.evaluate(outputs, model, samples=8, length=256).outputs:
    kl = measured["kl"]
    low, high = kl["interval"]
    print(f"{measured['output']['name']}: {kl['mean']:.4f} [{low:.4f}, {high:.4f}] nats, {measured['verdict']}")
