"""What every operator stands on; no operator is named here."""
