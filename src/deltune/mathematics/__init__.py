"""What Δh is: its forms, how it joins h, and which of its scalars are trained."""
