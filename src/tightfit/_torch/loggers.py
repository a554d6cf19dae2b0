"""Names of torch's loggers, for code that silences them."""

FAKE_TENSORS = "torch._subclasses.fake_tensor"
PYTREE = "torch.utils._pytree"
WRAPPED_OPERATIONS = "torch._higher_order_ops.wrap"
