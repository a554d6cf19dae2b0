"""Names of torch's loggers that tightfit silences for a while."""

FAKE_TENSORS = "torch._subclasses.fake_tensor"
PYTREE = "torch.utils._pytree"
WRAPPED_OPERATIONS = "torch._higher_order_ops.wrap"
