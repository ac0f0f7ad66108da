"""Fine-tune low-rank adapters of a backbone, and merge them."""

import torch

from backbones import create_backbone
from backbones.lora import merge_adapters
from heads.linear import LinearClassifier

torch.save(create_backbone("deit_t", img_size=64).state_dict(), "pretrained.pth")  # or a release

lora = {"rank": 8, "targets": ["qkv", "proj"]}
backbone = create_backbone("deit_t", img_size=64, pretrained="pretrained.pth", lora=lora)
model = LinearClassifier(backbone, num_classes=3)
trained = [one for one in model.parameters() if one.requires_grad]  # adapters and classifier
optimizer = torch.optim.AdamW(trained, lr=1e-3)
torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([0, 2])).backward()
optimizer.step()

merge_adapters(backbone)  # plain layers again
torch.save(model.state_dict(), "merged.pth")
LinearClassifier.from_pretrained("deit_t", "merged.pth", img_size=64)
