"""One LightningModule per kind of problem; what it trains and on which data is handed in."""
