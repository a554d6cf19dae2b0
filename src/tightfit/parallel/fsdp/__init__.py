"""ZeRO-3 and parameter offloading: a block's parameters are gathered only while the block runs."""
