"""Why a drafter's tokens are rejected: its agreement with the target, and engines that differ in one thing."""
