"""What left a site, and under which protection: written as it happens, checked afterwards."""
