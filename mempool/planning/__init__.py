"""From recorded events to installed plans: learner, plan builder, registry, and the planner thread."""
