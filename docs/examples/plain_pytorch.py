"""Train a classifier in plain PyTorch."""

import torch
from torch.nn.functional import cross_entropy

from backbones import create_backbone
from heads.linear import LinearClassifier

model = LinearClassifier(create_backbone("deit_t_afbo", img_size=64), num_classes=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images, labels = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 0])
for _ in range(2):
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
