"""One module for each tracker, with a class `Tracker` of the interface `pipeline.tracking.tracker_protocol.Tracker`.

`tracking.trackers` names the modules. Only the tracker's process creates the class, so the module's methods may import
the service's library, but not the module itself.
"""
