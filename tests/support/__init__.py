"""What tests share: processes, servers, models and what they must answer."""
