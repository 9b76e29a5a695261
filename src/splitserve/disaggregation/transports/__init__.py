"""The ways bytes travel between two pools. `TransferBackend` names them; each loads only when it is chosen."""
