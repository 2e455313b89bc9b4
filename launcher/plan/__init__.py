"""JobSpec + catalog + context -> Plan. Pure: no clock, environment, network, file or process."""
