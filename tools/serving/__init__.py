"""The page and the JSON of a trained network over HTTP."""
