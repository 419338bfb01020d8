"""Who does what where: the plan that a config asks for, and the assignment of its roles to ranks. Pure."""
