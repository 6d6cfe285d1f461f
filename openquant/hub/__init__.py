"""The Hugging Face Hub: a name becomes a source, shards come as they are needed, an output is published.

What is needed of a plan comes as names and sizes; nothing here knows what a plan is.

    Source     a directory, or a repository of which most is still on the Hub
    HubFile    one file of a repository, read by ranges
    Supply     source shards by the time they are needed, from the cache or through a scratch directory
    Publisher  uploads finished shards, and makes them a model with one commit
    refusals   what huggingface_hub raises -> errors that keep the server's reason and say what to do

    source = find_source("Qwen/Qwen3-8B@main")
    with Supply(source, {"model-00001-of-00005.safetensors": ["model-00001-of-00005.safetensors"]}, None) as supply:
        supply.wait_for("model-00001-of-00005.safetensors", stopped)
"""
