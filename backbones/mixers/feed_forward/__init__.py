"""Channel mixers: feed-forward networks with gates, convolutions and structured matrices."""
