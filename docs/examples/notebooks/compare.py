# %% [markdown]
# # Compare mixers
#
# `compare` trains each mixer several times on equal terms, and says what the runs show. Its plan
# comes first: what it costs, and the smallest difference that it can show.

# %%
import mixerlab  # makes tools importable
from tools import compare

host = "timm backbone.model=vit_tiny_patch16_224 backbone.patch_size=4 "
host += "backbone.options={embed_dim:32,depth:4,num_heads:2}"
words = [
    "mixer=ffn,afbo,glu",
    f"host={host}",
    "data=sample_classification data.image_size=32 data.train_copies=1",
    "baseline=ffn",
    "seeds=2",
    "rates=1",
    "trainer.max_epochs=2",
    "name=mine",
]
status = compare.main([*words, "only=plan"])

# %% [markdown]
# ## Run it
#
# Controls are added: `identity` and `random`, and the baseline again with other seeds. Repeat the
# cell to continue after a stop.

# %%
status = compare.main(words)

# %% [markdown]
# ## Read it
#
# "cannot tell" is an answer: the runs are too few for a smaller difference. The row `ffn again`
# has to be "cannot tell" or "equivalent". Networks of this size, trained for seconds, say nothing
# about large ones.

# %%
from IPython.display import Markdown

Markdown("outputs/comparisons/mine/table.md")

# %% [markdown]
# `outputs/comparisons/mine/report.html` has the table with curves, plan, runs and versions in one
# file.
#
# ## Add a seed
#
# Runs of before stay, and the report lists the change of the plan.

# %%
status = compare.main(["plan=outputs/comparisons/mine/plan.yaml", "seeds=3"])
