"""Floor 14. What the states of a model need at stage 2, under the path that scripts import it from."""

from infinity.memory_needs import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = ["estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live"]
