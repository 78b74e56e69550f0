"""The model, written once against ops and host."""
