"""Modules with the public interface of other packages, on leasehold's engine."""
