"""What is measured beside whom, at which sizes, and which budgets the figures are held to."""
