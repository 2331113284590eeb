"""The policy and its companions, as DeepSpeed and transformers have them."""
