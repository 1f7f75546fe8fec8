"""The experts: one stacked weight layout, and the backends that compute with it."""
