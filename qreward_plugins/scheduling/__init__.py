"""When and where requests are sent: the dispatcher, the planner behind it, and each source's upstream and breaker."""
