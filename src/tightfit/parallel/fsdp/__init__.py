"""ZeRO-3 and parameter offloading: parameters are gathered only while their block runs."""
