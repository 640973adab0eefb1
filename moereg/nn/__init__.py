"""A layer as a torch module, with parameters, `state_dict`, a router, and what `torch.export` keeps of it."""
