"""Myelin testkit: compliance suites, synthetic models and fault-injecting fakes for plugin authors."""
