"""An optimizer's step that happens wholly or not at all."""
