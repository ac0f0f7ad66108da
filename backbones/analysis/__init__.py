"""What is measured on a network and is no part of it: counts, Lipschitz bounds."""
