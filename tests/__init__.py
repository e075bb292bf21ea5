"""The tests. The folders mirror the rooms of src/holdfast; a test's name states the property that it shows."""
