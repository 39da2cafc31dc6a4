"""A hostile peer beside a well-behaved one: attacks on a broker in a process of its own.

``python -m tests.hostile [NAME...]`` runs rows of the table ``attacks.ATTACKS``, all without names,
and prints a table: what each attack once did, how long the probe waits before, during and after it,
and the memory of the broker before it, at its peak, and after the attacker has closed its
connections.

The probe (`probe`) is another process, which sends twenty messages a second, one of a megabyte in
between, and reads them all back with long polls. After each attack, `rig.check` asserts that

* no message was lost for which the probe has an answer, and none of its connections was closed;
* its long polls were held: none was answered before its time without a message;
* the memory of the broker never exceeded the ceiling of the row;
* the broker kept nothing: its own memory is back to what it was, but for what the row allows;
* its log is short, and has no error;
* the broker still serves.

Times are printed, not asserted: they say as much about the machine as about the broker.

To add a row, write a function in a module of this folder that takes an `Attacker`, and name it in
``ATTACKS``. It connects and sends as it likes; everything it opens with the attacker's methods is
closed at its end. ``settings`` are those of the broker, such as ``authenticationEnabled``. See that
the row fails without the protection that it shows. `test_hostile` picks up every row: the default
run mixes a few at random on one broker, the campaign runs each one on a broker of its own.
"""
