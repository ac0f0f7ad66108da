"""U-DiT and U-FFNet: U-Nets that denoise."""
