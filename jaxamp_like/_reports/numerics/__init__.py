"""`trace_numerics`: what becomes of the numbers, each op beside float32."""

from .numerics import trace_numerics as trace_numerics
