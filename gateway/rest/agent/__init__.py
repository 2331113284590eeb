"""Routes of the agents beside the dialects: models, stored responses, and a refusal of embeddings."""
