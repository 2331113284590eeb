"""Who answers: the rollout servers, the choice of one for a call, and answers that outlive their servers."""
