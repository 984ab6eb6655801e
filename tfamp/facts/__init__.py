"""What is true of formats, modes, devices, releases and TensorFlow's switches."""
