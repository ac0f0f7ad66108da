"""MetaMixer: token and channel mixers as queries, keys and values; FFNet's mixer among them.

In reading order: ``query_key_value`` (the general form), ``instances`` (attention, feed-forward
network, spatial MLP and convolutional forms) and ``ffnified`` (the registered mixer of FFNet).
"""
