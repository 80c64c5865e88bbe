"""The path of a call, shared by all operators: guard, key, plan, launch. No operator is named here."""
