"""Tests of minato.ops: native operators on volumes."""
