"""A layer as a torch module, with parameters, `state_dict`, a router, and support for `torch.export`."""
