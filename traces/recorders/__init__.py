"""What records traces where no pool serves: one module a framework, which it imports."""
