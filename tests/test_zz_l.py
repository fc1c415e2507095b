from django.db import connection, connections
def test_x(using):
    print(connection.settings_dict, connection.introspection.table_names())
    print(connections["default"].settings_dict["NAME"])
    import os; print(os.listdir(os.path.dirname(connection.settings_dict["NAME"])))
    assert 0
