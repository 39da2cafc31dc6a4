"""Orders and parcels."""
