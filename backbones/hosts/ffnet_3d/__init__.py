"""FFNet for point clouds: submanifold convolutions in a U-Net."""
