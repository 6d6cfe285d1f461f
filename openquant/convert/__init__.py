"""Carry out a plan on threads: read, quantize and write one bounded piece at a time.

conversion  Conversion writes the shards of a plan into a claimed output directory; its ShardProvider provides source
            shards (from a disk, a cache or a download), and learns which output shards are finished. TorchKernels are
            the arithmetic of a torch device

sizes = {shard.name: shard.nbytes for shard in plan.layout.shards}
with Claim(path, OutputContents(plan.digest, sizes, others={}), overwrite=False) as claim:
    # Every shard is then whole, under its final name.
    Conversion(plan, plan.layout.shards, transfer, claim.directory, "cpu", None, loops(fast=True)).run(workers=2)
"""
