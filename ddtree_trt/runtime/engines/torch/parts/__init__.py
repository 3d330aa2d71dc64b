"""Parts that some networks have: mixtures of experts, heads for pairs, convolutions."""
