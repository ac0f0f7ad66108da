"""Token mixers by attention without a softmax over pairs of tokens: kernels, agents, decays."""
